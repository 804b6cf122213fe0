"""Data in, as plain tensors: the embedded digits, files, the papers' data sets, a loader, a check.

Everything here ends as `Tensors`, a pair (x, y): x holds the data along the first dimension, as
float32 where that is exact and as float64 otherwise, y holds int64 class labels or float64 targets.
Values are rounded to float32 only after they are centred and scaled. Randomness comes from a
`torch.Generator` with its own seed, never from the global one.

| file | what is in it |
|---|---|
| `batches.py` | `TensorLoader`, `check_batch` |
| `embedded.py` | `digits`, `on_canvas` |
| `dataset.py` | `Dataset`, `dataset`: data of any kind, and what kind they are |
| `sources.py` | `read`: from a path to a `Dataset` |
| `files.py` | `read_idx`, `read_cifar` |
| `arrays.py`, `table.py`, `pictures.py`, `hub.py` | NumPy, CSV, images, Hugging Face folders |
| `official.py` | `mnist`, `fashion_mnist`, `cifar10`: folders of official files |
| `transforms.py` | `rotated`, `translated`, `scaled`, `resized`, `normalised`; `quadrants` |
| `resolution.py` | `moments` in float64, `warn_if_coarse` |
| `toy.py` | `rings` |
| `augment.py` | `flip_and_crop`, for training batches |
"""

from symrazor.data.arrays import read_npz as read_npz
from symrazor.data.augment import flip_and_crop as flip_and_crop
from symrazor.data.batches import TensorLoader as TensorLoader
from symrazor.data.batches import Tensors as Tensors
from symrazor.data.batches import check_batch as check_batch
from symrazor.data.dataset import Dataset as Dataset
from symrazor.data.dataset import dataset as dataset
from symrazor.data.embedded import digits as digits
from symrazor.data.embedded import on_canvas as on_canvas
from symrazor.data.files import read_cifar as read_cifar
from symrazor.data.files import read_idx as read_idx
from symrazor.data.official import cifar10 as cifar10
from symrazor.data.official import fashion_mnist as fashion_mnist
from symrazor.data.official import mnist as mnist
from symrazor.data.sources import read as read
from symrazor.data.toy import rings as rings
from symrazor.data.transforms import normalised as normalised
from symrazor.data.transforms import quadrants as quadrants
from symrazor.data.transforms import resized as resized
from symrazor.data.transforms import rotated as rotated
from symrazor.data.transforms import scaled as scaled
from symrazor.data.transforms import translated as translated
