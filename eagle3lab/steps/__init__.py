"""One verb a file. Notebooks and the command line call only these."""
