"""One process a rank: ranks meet at a store of `torch.distributed`, and use its groups (gloo, NCCL) where ours end.

Nothing here touches the default process group, so a program that has one of its own keeps it.
"""
