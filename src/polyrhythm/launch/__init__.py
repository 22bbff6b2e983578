"""Starting ranks and giving them roles: local processes, or what torchrun has started."""
