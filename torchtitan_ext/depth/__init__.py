"""The science: how a decoder's layers hand a depth state along, and the variants of it."""

import torchtitan_ext.titan  # noqa: F401  (chooses the device, before torchtitan is imported)
