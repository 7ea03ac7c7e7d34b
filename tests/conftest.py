"""Property tests take the same examples in every run, so that a change is judged and not the dice."""

import hypothesis

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
