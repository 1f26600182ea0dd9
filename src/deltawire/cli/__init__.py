"""The command line: thin commands over the layers below, each loading only what it needs."""
