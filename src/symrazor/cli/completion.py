"""`symrazor completion`: what a shell needs to complete commands and options."""

from typing import Literal

import tyro


def completion(shell: tyro.conf.Positional[Literal["bash", "zsh"]]) -> None:
    """Print the completion script of a shell.

    For bash: symrazor completion bash > ~/.local/share/bash-completion/completions/symrazor

    Args:
        shell: bash or zsh.
    """
    from symrazor.cli.app import run

    run(["--tyro-print-completion", shell])
