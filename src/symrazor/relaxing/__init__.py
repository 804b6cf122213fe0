"""An ordinary network in, a relaxed one out."""
