"""Text to token shards, and reading them back. No torch in here.

``command`` is ``depth prep``; ``dataset`` opens a prepared folder; ``windows`` turns its tokens into samples in a
seeded order.
"""
