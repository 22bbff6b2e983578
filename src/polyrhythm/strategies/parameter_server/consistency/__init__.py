"""Who may proceed when: each file is one rule, a small state machine without parameters or network."""
