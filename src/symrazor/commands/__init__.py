"""The verbs of the command, one file each: arguments in, a call, tables or JSON out. No logic."""
