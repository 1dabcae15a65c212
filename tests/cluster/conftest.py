"""Models for the tests with real runs."""

from tests.support.models import digits_model as digits_model
from tests.support.models import grounding_model as grounding_model
from tests.support.models import picture_model as picture_model
