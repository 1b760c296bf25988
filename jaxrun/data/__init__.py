"""Source, tokens, batches: `open_dataset` finds the data, `Dataset` knows every row, `Loader` reads ahead."""

from jaxrun.data.dataset import Dataset, Rows, Span, open_dataset
from jaxrun.data.loader import Loader
from jaxrun.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer

__all__ = ["ByteTokenizer", "CharTokenizer", "Dataset", "Loader", "Rows", "Span", "Tokenizer", "open_dataset"]
