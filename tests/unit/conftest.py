"""What all unit tests share: Hypothesis asks how long nothing takes, for that says how busy the
machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
