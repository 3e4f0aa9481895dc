"""Without a network: known at once, rather than after a library's retries of minutes for each file."""

import os

PATIENCE_S = 10.0


def go_offline_if_unreachable() -> str | None:
    """Try the Hugging Face hub, from which the harness's tasks fetch their data. Where it does not answer within
    ``PATIENCE_S`` seconds, let this process use what is in its cache and say why; None where it answers, or an answer
    of any kind comes.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set"
    try:
        # The client that would download, so that its proxies and certificates count.
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
    except Exception as error:  # Which library's exceptions these are depends on the hub's version.
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
        return f"{constants.ENDPOINT} cannot be reached: {str(error).splitlines()[0] if str(error) else repr(error)}"
    return None
