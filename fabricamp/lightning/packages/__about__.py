"""The attributes of ``lightning.__about__``, with fabricamp as the author, and the version."""

from fabricamp.lightning.packages.__version__ import version as __version__

__author__ = "fabricamp"
__author_email__ = ""
__license__ = "Apache-2.0"
__copyright__ = "fabricamp"
__homepage__ = ""
__docs_url__ = ""
__docs__ = "fabricamp under Lightning's names"

__all__ = [
    "__author__",
    "__author_email__",
    "__copyright__",
    "__docs__",
    "__docs_url__",
    "__homepage__",
    "__license__",
    "__version__",
]
