import inspect

import pytest

import bandmf_tf


@pytest.mark.parametrize("name", bandmf_tf.__all__)
def test_public_name_is_documented(name: str):
    documentation = inspect.getdoc(getattr(bandmf_tf, name)) or ""
    first_sentence = documentation.split("\n\n")[0]
    assert first_sentence.endswith((".", ":")), f"{name} has no docstring"


def test_all_is_sorted_and_complete():
    defined = {
        name
        for name, value in vars(bandmf_tf).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(bandmf_tf.__all__) == defined
    assert bandmf_tf.__all__ == sorted(bandmf_tf.__all__)
