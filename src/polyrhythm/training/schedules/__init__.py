"""The learning-rate schedules: every module is one choice, such as `cosine(warmup_epochs=1)`."""
