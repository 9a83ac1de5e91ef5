"""Folders of cases are collected only by the ranks that ``launch.py`` starts."""

import os

collect_ignore = [] if "HVD_COMPRESS_RANK_TESTS" in os.environ else ["cases", "tf_cases", "keras_cases"]
