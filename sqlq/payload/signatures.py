"""Signatures and annotations of functions whose annotations may name what is not there.

From Python 3.14 on annotations are evaluated when they are read. They may name what comes further down, or
what only type checkers import.
"""

import inspect
import sys

if sys.version_info < (3, 14):
    signature_of, annotations_of = inspect.signature, inspect.get_annotations
else:
    from functools import partial

    from annotationlib import Format

    def signature_of(function):
        try:
            return inspect.signature(function)
        except Exception:  # then annotations stay text
            return inspect.signature(function, annotation_format=Format.STRING)

    annotations_of = partial(inspect.get_annotations, format=Format.FORWARDREF)
