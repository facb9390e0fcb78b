// What scrolls sideways can be reached by the keyboard. The theme wraps tables and visits code blocks after it has loaded.
document$.subscribe(() => setTimeout(() => {
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
}, 200));
