"""The model of the runs."""

from tests.support.models import digits_model as digits_model
