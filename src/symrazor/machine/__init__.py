"""How work is put on cores and on a GPU."""
