"""live: commands that go on until they are stopped: an endpoint, a proxy, a watch and a page."""
