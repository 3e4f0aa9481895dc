"""The one room that knows torchtitan's insides. Moving to its next release means reading this room again, and no other.

Importing it points torchtitan at the CPU where there is no accelerator. That has to come before any other part of
torchtitan is
imported, so ``torchtitan_ext.depth``, which builds on torchtitan's public parts, imports it first.
"""

from .cpu import use_cpu_without_accelerator

use_cpu_without_accelerator()
