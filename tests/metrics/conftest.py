from tests.allocations import named_allocations

__all__ = ["named_allocations"]
