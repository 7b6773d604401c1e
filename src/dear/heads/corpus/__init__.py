"""Phrases that describe heads: packaged ones, or a user's."""

from dear.heads.corpus.build import Phrase
from dear.heads.corpus.load import Corpus, load_corpus

__all__ = ["Corpus", "Phrase", "load_corpus"]
