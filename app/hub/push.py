"""An exported folder pushed to the hub: only where the user asks for it, private unless it is there already."""

from __future__ import annotations

from pathlib import Path

from penstock.app.console.working import working
from penstock.app.hub.access import explain_hub, online, quiet
from penstock.app.hub.names import HubName, offline_wanted, parse_hub
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import shell


def require_push(name: str) -> HubName:
    """The repository to push to. UserError where that cannot be done, as far as is known without asking the hub."""
    from huggingface_hub import get_token

    hub = parse_hub(name)
    if hub.revision is not None:
        raise UserError(f"--push {name}: uploads to the main branch; leave out @{hub.revision}")
    if offline_wanted():
        raise UserError(f"--push {name}: HF_HUB_OFFLINE is set; unset it, or export without --push")
    if get_token() is None:
        raise UserError(f"--push {name}: you are not logged in to the hub; run `hf auth login`, or set HF_TOKEN")
    return hub


def push_folder(folder: Path, name: str) -> str:
    """Upload a folder as a model; what was done, in words. UserError, one line; the folder stays as it is."""
    from huggingface_hub import HfApi

    hub = require_push(name)
    again = f"{folder} is complete; upload it with `{shell('hf', 'upload', hub.name, folder)}`"
    with online(), quiet(), working(f"uploading to {hub}"):
        try:
            api = HfApi()
            existed = api.repo_exists(hub.name)
            if not existed:
                api.create_repo(hub.name, private=True, exist_ok=True)
            done = api.upload_folder(
                repo_id=hub.name, folder_path=folder, commit_message="Trained with Penstock", ignore_patterns=[".*"]
            )
        except KeyboardInterrupt:
            raise UserError(f"--push {name}: interrupted; {again}") from None
        except Exception as error:
            raise UserError(f"--push {name}: {explain_hub(error, hub, 'model', pushing=True)}; {again}") from error
    url = str(done.commit_url).partition("/commit/")[0]
    return f"pushed to {url}" + ("" if existed else ", a new private repository; its visibility can be changed there")
