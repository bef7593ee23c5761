/* PURE handling of command lines and paths. */
#include "everstep.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * The words of /proc/PID/cmdline, each of which ends with a NUL. They point into `text`, which must end with a NUL of
 * its own; the array is to be freed. NULL where there is no memory or no word.
 */
char **words_split(char *text, size_t length, int *count)
{
	char **words = NULL;
	int found = 0;

	for (size_t at = 0; at < length; at += strlen(text + at) + 1)
		found++;
	if (!found || !(words = calloc((size_t)found + 1, sizeof(*words))))
		return NULL;
	*count = 0;
	for (size_t at = 0; at < length && *count < found; at += strlen(text + at) + 1)
		words[(*count)++] = text + at;
	return words;
}

/* Where a program is, by PATH unless it is named with a folder: 0, or -1 where it is nowhere. */
int words_find_program(const char *program, const char *path, char *found, size_t size,
		       bool (*executable)(const char *path))
{
	if (strchr(program, '/')) {
		int written = snprintf(found, size, "%s", program);

		return written > 0 && (size_t)written < size && executable(found) ? 0 : -1;
	}
	for (const char *at = path; at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
		int length = (int)strcspn(at, ":");
		int written = snprintf(found, size, "%.*s/%s", length ? length : 1, length ? at : ".", program);

		if (written > 0 && (size_t)written < size && executable(found))
			return 0;
	}
	return -1;
}

static const char *name_of(const char *program)
{
	const char *slash = strrchr(program, '/');

	return slash ? slash + 1 : program;
}

/* torchrun, or a Python that may start it (`-m torch.distributed.run`). The launcher looks closer. */
bool words_starts_torchrun(const char *program)
{
	const char *name = name_of(program);

	if (strcmp(name, "torchrun") == 0)
		return true;
	if (strncmp(name, "python", 6) != 0)
		return false;
	for (name += 6; *name; name++)
		if (!isdigit((unsigned char)*name) && *name != '.')
			return false;
	return true;
}

/* The everstep of the environment that the user's torchrun or Python belongs to: 0, or -1 where it has none. */
int words_everstep_beside(const char *program, const char *path, char *found, size_t size,
			  bool (*executable)(const char *path))
{
	char *name = NULL;
	size_t left = 0;

	if (!words_starts_torchrun(program) || words_find_program(program, path, found, size, executable) < 0)
		return -1;
	if (found[0] != '/' || !(name = strrchr(found, '/')))
		return -1;
	left = size - (size_t)(++name - found);
	if (snprintf(name, left, "everstep") >= (int)left)
		return -1;
	return executable(found) ? 0 : -1;
}

/* Is `--name` or `--name=…` among these words, in full? */
bool words_have_option(char **words, int count, const char *name)
{
	size_t length = strlen(name);

	for (int i = 0; i < count; i++)
		if (strncmp(words[i], name, length) == 0 && (!words[i][length] || words[i][length] == '='))
			return true;
	return false;
}
