"""From data to a verdict: which structure do they ask for, and a network that has it.

| file | what happens there |
|---|---|
| `api.py` | `discover`: data in, a `Discovery` out; the embedded digits |
| `kinds.py` | kind of data -> the networks that are compared |
| `maps.py`, `sets.py`, `vectors.py` | those networks; `structures.py`: what a candidate is |
| `offered.py`, `places.py` | groups that a user offers; networks for those that permute places |
| `trajectories.py`, `motion.py` | conserved quantities, by `symrazor.dynamics`; an animation |
| `asked.py` | a question and the options of a run |
| `budget.py`, `planning.py` | passes and data that fit into the time given; a plan that is kept |
| `run.py` | the candidates of one question, trained; unfinished ones taken up |
| `unseen.py` | how well they predict training data that they have not seen |
| `longer.py` | which of them gets the rest of the time, and how much that is |
| `invariances.py` | which transformations of a picture leave its label alone |
| `preparation.py` | scaled inputs and targets, and the network without that |
| `answer.py` | candidates ranked, a verdict in words |
| `result.py`, `document.py`, `folder.py` | what comes out: as an object, as JSON, as files |
| `digits.py` | the embedded digits, asked twice |
"""

from symrazor.discover.answer import Answer as Answer
from symrazor.discover.answer import Candidate as Candidate
from symrazor.discover.api import discover as discover
from symrazor.discover.api import discover_digits as discover_digits
from symrazor.discover.asked import Options as Options
from symrazor.discover.result import Discovery as Discovery
