"""Types and shapes as they are annotated, checked at every call (see CONTRIBUTING)."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # a whole number is a float as well
