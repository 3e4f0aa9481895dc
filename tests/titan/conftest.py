"""Choose the device before a test's imports bring torchtitan in."""

import torchtitan_ext.titan  # noqa: F401
