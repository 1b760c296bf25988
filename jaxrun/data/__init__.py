"""Source, tokens, batches: `open_dataset` finds the data, `Dataset` knows every row, `Loader` reads ahead."""

from jaxrun.data.dataset import Dataset, PackedRows, Rows
from jaxrun.data.documents import Span
from jaxrun.data.loader import Loader
from jaxrun.data.mixture import Mixture
from jaxrun.data.opening import open_dataset, open_eval_sets
from jaxrun.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer

TrainingData = Dataset | Mixture

__all__ = [
    "ByteTokenizer", "CharTokenizer", "Dataset", "Loader", "Mixture", "PackedRows", "Rows", "Span", "Tokenizer", "TrainingData", "open_dataset", "open_eval_sets",
]  # fmt: skip
