"""`python benchmarks/fit.py`: what learning by the evidence costs beside plain training."""

from symrazor.bench.fit import command

if __name__ == "__main__":
    command()
