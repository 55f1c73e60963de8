// The theme's letters for the pages before and behind: what is typed for a search that is not open yet must not turn pages.
addEventListener("keydown", event => {
  if ("np,.".includes(event.key) && !event.ctrlKey && !event.metaKey && !event.altKey) event.stopImmediatePropagation();
}, { capture: true });
