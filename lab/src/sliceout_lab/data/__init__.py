"""Data sets that the lab trains on: read from their official files, fed in batches that are made on the device."""

from .catalogue import DATASETS, NAMES
from .fashion import fashion_mnist, read_folder
from .feeds import Feed
from .files import DataError
from .idx import read_idx, write_idx
from .load import load
from .make_feed import feed
from .sets import ImageFolder, Images, Tokens

__all__ = [
    "DATASETS",
    "NAMES",
    "DataError",
    "Feed",
    "ImageFolder",
    "Images",
    "Tokens",
    "fashion_mnist",
    "feed",
    "load",
    "read_folder",
    "read_idx",
    "write_idx",
]
