"""The optimizers: every module is one choice, such as `sgd(lr=0.05, momentum=0.9)`."""
