"""One process a rank, over `torch.distributed`: gloo links and groups, NCCL between GPUs.

Nothing here touches the default process group, so a program that has one of its own keeps it.
"""
