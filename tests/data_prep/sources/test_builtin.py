"""The text that comes with Python."""

from pydoc_data.topics import topics

from data_prep.sources import BuiltinSource, blocks


def test_holds_the_language_reference_and_the_library_documentation() -> None:
    source = BuiltinSource()
    documents = [text for block in blocks(source) for piece in block.pieces for text in piece.texts()]
    assert documents[: len(topics)] == list(topics.values())
    library = documents[len(topics) :]
    assert any("JavaScript Object Notation" in text or "argparse" in text for text in library)
    assert len(library) > 50
    assert sum(block.work for block in blocks(source)) == source.work == sum(map(len, documents))
