r"""How often the data themselves are mirrored: shares of discrete poses that a network sees.

As for ranges of poses (`poses`): with `average="joint"` a datum is one in a standard pose under an
element of a finite group G with shares $q$, and the weights of the network are fixed,

$$ \hat q = \arg\max_q \sum_y \log \frac{1}{|G|} \sum_{h \in G} \prod_{n: y_n = y}
   \sum_{e \in G} q_e \exp g_y(T_{h e} x_n) . $$

Which pose $h$ of a class is the standard one is chance, and it is summed over. $p(y \mid x)$ does
not mind shares that are too even; this density does. EM climbs it: posteriors of $h$ for each class
and of $e$ for each datum, then $q$ is their mean. Shares that are not even pay half the logarithm
of the number of data for each free one (Schwarz's criterion); the largest is that of the identity,
since a common factor of all h changes nothing.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

STEPS = 300
"""Of EM."""
START = 0.8
"""Share of the identity where EM starts."""


def likeliest_shares(
    energies: Float[Tensor, "n e"], y: Int[Tensor, " n"], products: Int[Tensor, "e e"]
) -> Float[Tensor, " e"]:
    """Shares of the elements with the highest likelihood, the identity's the largest.

    Args:
        energies: logarithm of the density of each datum under each element, up to a constant.
        y: classes.
        products: number of the element h e, for each h and e; the identity is number 0.
    """
    n, e = energies.shape
    seen = energies.double()[:, products.to(energies.device)]
    own = F.one_hot(y.long()).to(seen)
    even = seen.new_full((e,), 1 / e)
    q = seen.new_full((e,), (1 - START) / max(e - 1, 1))
    q[0] = START
    for _ in range(STEPS):
        terms = seen + q.clamp(min=1e-300).log()
        standard = (own.T @ terms.logsumexp(2)).softmax(1)
        q = torch.einsum("nh,nhe->e", own @ standard, terms.softmax(2)) / n
    price = 0.5 * (e - 1) * math.log(n)
    if log_likelihood(q, seen, own) - price <= log_likelihood(even, seen, own):
        return even
    return q[products[int(q.argmax())].to(q.device)]


def log_likelihood(
    q: Float[Tensor, " e"], seen: Float[Tensor, "n h e"], own: Float[Tensor, "n classes"]
) -> float:
    """See the module; `seen` are the energies under the product of h and e."""
    data = (seen + q.clamp(min=1e-300).log()).logsumexp(2)
    return float(((own.T @ data).logsumexp(1) - math.log(seen.shape[1])).sum())
