"""How a global batch is shared among workers that take their steps together; every module is one choice."""
