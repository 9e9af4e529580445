"""Three common ways of pairing dumps with samples, and headrace's, judged by an oracle.

`by_counter`, `clear_and_scan` and `by_token_count` are written as a competent person in a hurry writes them, each
against a server that was patched in the common way (`dumper`): every finished prefill leaves a numbered folder, which
is complete before the request is answered.

What harms them under the first condition, as served:

- a prefix cache, whose rows are in no forward, and prompts that are split over several steps, of which the patch dumps
  the last part, as SGLang's own hidden states have it. Ids that only one prompt has could keep a cache out; none of
  the three sends any, and a chat template's first tokens alone are shared by all prompts.
- eight requests at a time. Only `by_token_count` is made for that; workers that clear and scan remove each other's
  dumps, and a counter hopes that requests are computed in the order in which they were sent.
- health probes and somebody else's chats, at fixed times. One of them is enough for a counter to be wrong until the
  end, so how much it has right says how early the first one came.

The next conditions take these away, one after the other, until the last one has one request at a time and nobody else
on a server without a cache.

What favours them under every condition: a dump is always there when its answer comes, the dump folder is theirs alone,
nobody clears it or restarts the server, no request fails, and each begins by looking at what is there.
"""
