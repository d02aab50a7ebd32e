"""How long a batch takes: operators of a model, the sources that time them, and tables of the answers."""
