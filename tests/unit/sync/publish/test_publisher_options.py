"""The declared options of publishers are those that publishers take."""

from typing import get_type_hints

import pytest

from deltawire.errors import InputError
from deltawire.sync import Publisher, ShardPublisher
from deltawire.sync.publish.options import HookOptions, PublisherOptions, check_options
from deltawire.trl.sharded import check_shard_options

OPENED = {"bucket", "run", "mirror", "epoch", "newest", "signer", "announce", "return"}
"""The parameters that `open_publisher` derives or declares itself."""


def test_the_options_of_open_publisher_are_those_of_publishers_with_their_types():
    taken = get_type_hints(Publisher.__init__)
    expected = {name: kind for name, kind in taken.items() if name not in OPENED}
    assert get_type_hints(PublisherOptions) == expected


def test_an_option_that_was_not_declared_is_refused():
    check_options(dict.fromkeys(PublisherOptions.__optional_keys__))
    for wrong in ("epoch", "retian"):
        with pytest.raises(InputError, match=f"no option '{wrong}' of a publisher"):
            check_options({wrong: 1})


def test_every_option_of_the_hook_is_one_of_a_writer():
    taken = get_type_hints(ShardPublisher.__init__) | {"name": str}
    for name, kind in get_type_hints(HookOptions).items():
        if name in PublisherOptions.__optional_keys__:
            assert get_type_hints(PublisherOptions)[name] == kind
        else:
            check_shard_options({name: None})
            assert taken[name] == kind
