/* Loaded before the page is painted, so that the chosen theme is there from the first moment on. */
{
  const chosen = localStorage.getItem('weir-theme');
  if (chosen === 'light' || chosen === 'dark') document.documentElement.dataset.theme = chosen;
}
