"""One module per command of the command line, named like it: thin, and quick to import."""
