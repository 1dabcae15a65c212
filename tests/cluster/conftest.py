"""Models for the tests with real runs."""

from tests.support.models import digits_model as digits_model
