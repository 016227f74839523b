"""The command line: tools around a server."""
