"""ui: the page that simulates while its sliders are dragged."""

from pathlib import Path
from socket import getfqdn, gethostname
from typing import Annotated

from cyclopts import Parameter

from windtunnel.cli.arguments import progress
from windtunnel.cli.live.serve import require_extra
from windtunnel.scenario import DEPLOYMENT, Scenario
from windtunnel.serve.place import Place


def ui(
    scenario: Annotated[Scenario, Parameter(name="*")] = Scenario(),  # noqa: B008 - frozen
    *,
    scenario_file: Annotated[Path | None, Parameter(name="--scenario", group=DEPLOYMENT)] = None,  # noqa: ARG001 - read while parsing
    studies: Annotated[tuple[Path, ...], Parameter(show_default=False)] = (),
    place: Annotated[Place, Parameter(name="*")] = Place(),  # noqa: B008 - frozen
    open_browser: Annotated[bool, Parameter(name="--open", negative=())] = False,
) -> None:
    """Serve a page on this machine that simulates while you drag its sliders.

    Flags are those of run, and what the page begins with. It needs no network, and gives the figures of run; its
    address holds its state. Runs until it is interrupted. Needs the extra serve: pip install 'windtunnel[serve]'.

    Parameters
    ----------
    scenario_file
        YAML file with these flags' words as keys, underscores for dashes; flags go before it.
    studies
        Stores of plan --store, documents of sweep --json and plan --json, folders of run --output, or folders with
        these, to explore in the page.
    open_browser
        Open the page in the browser.
    """
    require_extra()
    from windtunnel.serve.server import listen
    from windtunnel.ui.asked import words_given
    from windtunnel.ui.bench import Bench
    from windtunnel.ui.foresight import Foresight
    from windtunnel.ui.routes import application
    from windtunnel.ui.studies import files_of

    files_of(studies)
    start = words_given(scenario)
    with place.bind() as socket:
        with progress("reading batch times, and compiling the scheduler once on this machine"):
            Bench(start).warm_up(start)
        hosts = (place.host, gethostname().lower(), getfqdn().lower())
        app = application(start, studies, hosts, Foresight())
        socket.listen()  # who opens the address at once has to wait, but is not refused
        address = f"http://{place.host}:{socket.getsockname()[1]}/"
        if open_browser:
            import webbrowser

            webbrowser.open(address)
        listen(app, socket, address)
