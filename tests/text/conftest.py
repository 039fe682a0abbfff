import pytest
import tokenizers

from mlx_mtp.text.tokenizer import Tokenizer
from tests.text import folders

MAKERS = [folders.gemma_like, folders.byte_level, folders.sentencepiece]


@pytest.fixture(scope="session", params=MAKERS, ids=lambda maker: maker.__name__)
def folder(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp(request.param.__name__))


@pytest.fixture(scope="session")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory):
    """(our tokenizer, the `tokenizers` library's) for one file."""
    path = folders.gemma_like(tmp_path_factory.mktemp("gemma"))
    return Tokenizer.from_folder(path), tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
