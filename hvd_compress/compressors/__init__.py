"""The compressors: one algorithm, one file, no framework.

``ALL`` lists them by the name that :func:`hvd_compress.make` knows; tests and documentation
go through it.
"""

from hvd_compress.compressors.casts import BF16, FP16, NoCompression
from hvd_compress.compressors.coordinated import CoordinatedTopK
from hvd_compress.compressors.dgc import DGC
from hvd_compress.compressors.levels import QSGD, Int8, TernGrad
from hvd_compress.compressors.natural import Natural
from hvd_compress.compressors.policy import Policy, Rule
from hvd_compress.compressors.powersgd import PowerSGD
from hvd_compress.compressors.randomk import RandomK
from hvd_compress.compressors.signs import EFSign, OneBit, SignSGD, Signum
from hvd_compress.compressors.svd import SVD
from hvd_compress.compressors.switch import Switch
from hvd_compress.compressors.threshold import AdaptiveThreshold, Threshold
from hvd_compress.compressors.topk import TopK
from hvd_compress.compressors.vector import VectorQuantizer, train_codebook

ALL = {
    "none": NoCompression,
    "fp16": FP16,
    "bf16": BF16,
    "topk": TopK,
    "randomk": RandomK,
    "threshold": Threshold,
    "adaptivethreshold": AdaptiveThreshold,
    "coordinatedtopk": CoordinatedTopK,
    "dgc": DGC,
    "int8": Int8,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "natural": Natural,
    "signsgd": SignSGD,
    "signum": Signum,
    "efsign": EFSign,
    "onebit": OneBit,
    "vectorquantizer": VectorQuantizer,
    "powersgd": PowerSGD,
    "svd": SVD,
}

__all__ = [
    "ALL",
    "BF16",
    "DGC",
    "FP16",
    "QSGD",
    "SVD",
    "AdaptiveThreshold",
    "CoordinatedTopK",
    "EFSign",
    "Int8",
    "Natural",
    "NoCompression",
    "OneBit",
    "Policy",
    "PowerSGD",
    "RandomK",
    "Rule",
    "SignSGD",
    "Signum",
    "Switch",
    "TernGrad",
    "Threshold",
    "TopK",
    "VectorQuantizer",
    "train_codebook",
]
