/*
 * Prints Java's text of each name that standard input has as a line: DER in hexadecimal digits.
 */

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HexFormat;
import javax.security.auth.x500.X500Principal;

public class Names {
    public static void main(String[] arguments) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in));
        var found = new StringBuilder();
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String text = new X500Principal(HexFormat.of().parseHex(line)).getName();
            found.append(HexFormat.of().formatHex(text.getBytes("UTF-8"))).append('\n');
        }
        System.out.print(found);
    }
}
