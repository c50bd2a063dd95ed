"""The official releases: where each data set is downloaded from, and the checksums of its files.

Checksums of files are of their contents, unpacked: gzip may pack the same bytes in many ways.
"""

from __future__ import annotations

from dataclasses import dataclass

from .fashion import FILES

_TORONTO = "https://www.cs.toronto.edu/~kriz"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_WIKITEXT = "https://s3.amazonaws.com/research.metamind.io/wikitext"


@dataclass(frozen=True)
class Download:
    """One file to fetch. An archive is unpacked into the data folder; anything else goes into ``folder`` as it is."""

    url: str
    algorithm: str
    checksum: str
    folder: str = "."

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def archive(self) -> bool:
        return self.name.endswith((".tar.gz", ".zip"))


def _idx(base: str, folder: str, *md5: str) -> tuple[Download, ...]:
    return tuple(Download(f"{base}/{file}.gz", "md5", sum_, folder) for file, sum_ in zip(FILES, md5, strict=True))


DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "mnist": _idx(
        _MNIST,
        "mnist",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion-mnist": _idx(
        _FASHION,
        "fashion-mnist",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "cifar-10": (Download(f"{_TORONTO}/cifar-10-binary.tar.gz", "md5", "c32a1d4ab5d03f1284b67883e8d87530"),),
    "cifar-100": (Download(f"{_TORONTO}/cifar-100-binary.tar.gz", "md5", "03b5dce01913d631647c71ecec9e9cb8"),),
    "tiny-imagenet": (
        Download("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5", "90528d7ca1a48142e341f4ef8d21d0de"),
    ),
    "wikitext-2": (Download(f"{_WIKITEXT}/wikitext-2-v1.zip", "md5", "542ccefacc6c27f945fb54453812b3cd"),),
    "wikitext-103": (Download(f"{_WIKITEXT}/wikitext-103-v1.zip", "md5", "9ddaacaf6af0710eda8c456decff7832"),),
    "lm1b": (
        Download(
            "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
            "sha256",
            "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
        ),
    ),
}
OTHER_ARCHIVES: dict[str, tuple[Download, ...]] = {  # other forms of the same data that people have at hand
    "cifar-10": (Download(f"{_TORONTO}/cifar-10-python.tar.gz", "md5", "c58f30108f718f92721af3b95e74349a"),),
    "cifar-100": (Download(f"{_TORONTO}/cifar-100-python.tar.gz", "md5", "eb9058c3a382ffc7106e4002c42a8d85"),),
}
BY_HAND = {
    "imagenet": "ImageNet is given out at https://image-net.org after registration (ILSVRC2012_img_train.tar, MD5 "
    "1d675b47d978889d74fa0da5fadfb00e; ILSVRC2012_img_val.tar, MD5 29b22e2961454d5413ddabcf34fc5622). Unpack the "
    "images of each class into a folder of its own, named by its WordNet number.",
    "tiny-imagenet-100": "This form of it is not on the internet; copy its folder (index.json, train-*.bin, val.bin).",
    "lm1b-slice": "This slice is not on the internet; copy its folder.",
    "english-books": "This collection is not on the internet; copy its folder, or use text:PATH with other books.",
}

CONTENTS: dict[str, dict[str, tuple[str, str]]] = {
    "mnist": {
        FILES[0]: ("sha256", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        FILES[1]: ("sha256", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        FILES[2]: ("sha256", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        FILES[3]: ("sha256", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    },
    "fashion-mnist": {
        FILES[0]: ("sha256", "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        FILES[1]: ("sha256", "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        FILES[2]: ("sha256", "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        FILES[3]: ("sha256", "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    },
    "cifar-10": {
        "data_batch_1.bin": ("sha1", "aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
        "data_batch_2.bin": ("sha1", "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
        "data_batch_3.bin": ("sha1", "1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
        "data_batch_4.bin": ("sha1", "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
        "data_batch_5.bin": ("sha1", "26e2849e66a845b7f1e4614ae70f4889ae604628"),
        "test_batch.bin": ("sha1", "67eb016db431130d61cd03c7ad570b013799c88c"),
        "data_batch_1": ("md5", "c99cafc152244af753f735de768cd75f"),
        "data_batch_2": ("md5", "d4bba439e000b95fd0a9bffe97cbabec"),
        "data_batch_3": ("md5", "54ebc095f3ab1f0389bbae665268c751"),
        "data_batch_4": ("md5", "634d18415352ddfa80567beed471001a"),
        "data_batch_5": ("md5", "482c414d41f54cd18b22e5b47cb7c3cb"),
        "test_batch": ("md5", "40351d587109b95175f43aff81a1287e"),
    },
    "cifar-100": {
        "train": ("md5", "16019d7e3df5f24257cddd939b257f8d"),
        "test": ("md5", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    },
}
