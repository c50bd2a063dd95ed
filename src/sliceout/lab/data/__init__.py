"""Data sets that the lab trains on, read from their official files."""

from .fashion import Images, fashion_mnist, read_folder
from .idx import DataError, read_idx, write_idx

__all__ = ["DataError", "Images", "fashion_mnist", "read_folder", "read_idx", "write_idx"]
