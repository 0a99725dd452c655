"""The command line of a rank, and the script that it runs."""
