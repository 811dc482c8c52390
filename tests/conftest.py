"""One hypothesis profile for the whole suite: examples follow from the test's own name, so a failure repeats."""

from hypothesis import settings

from tests.sizes import scaled

settings.register_profile("birkhoff", deadline=None, derandomize=True, max_examples=scaled(200, 30))
settings.load_profile("birkhoff")
